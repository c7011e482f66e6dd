"""How a call of a Communicator becomes a call of a transport: checked, agreed on, traced, watched, run or enqueued."""

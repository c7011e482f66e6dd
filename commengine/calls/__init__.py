"""How a call of a Communicator becomes a transport's: checked, agreed on, traced, watched, run or enqueued."""

"""Pipeline stages: in which order a rank computes, the messages between stages, and the step that does both."""

"""Files as bytes: reading those that users name, within limits, and lists of checksums."""

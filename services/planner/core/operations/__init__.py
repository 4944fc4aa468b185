"""Scale operations: what to do about a wanted number of instances, the messages it becomes, and what came of it."""

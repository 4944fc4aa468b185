"""What the control plane costs at a thousand workers: real services and servers, simulated workers."""

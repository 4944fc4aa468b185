"""Where this worker sits: its NIC, scale-up domain, host link and SSD, found on the machine itself."""

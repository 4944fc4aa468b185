"""What services' shells ask their cores, recorded, and played to fresh cores in virtual time."""

"""What a request needs of device and host memory, and which residency that leaves."""

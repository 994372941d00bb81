"""What the device, the host and the program around give: recorded graphs, streams, threads, free memory."""

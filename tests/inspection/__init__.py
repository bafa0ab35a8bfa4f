"""What the callback shows of the inside of the device, and what it says that costs."""

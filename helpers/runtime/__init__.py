"""What the machine does: real ranks beside the kernel, their bytes, their failures."""

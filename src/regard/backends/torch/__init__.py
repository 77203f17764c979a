"""What torch's own operators compute, on any device."""

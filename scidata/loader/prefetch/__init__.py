"""Reading ahead: buffers, reader threads, and copies to the device."""

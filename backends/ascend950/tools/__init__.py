"""Command-line tools of the Ascend backend: the CANN stub builder, and questions for a device."""

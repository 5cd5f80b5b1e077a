"""Jobs that `amem doctor` starts, whose ranks are processes with NCCL and the driver through ctypes: measured, and proved."""

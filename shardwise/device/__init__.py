"""Devices: the only package that names a type of device; all others ask what a device can do."""

"""What a machine can do, measured: devices, memory, rates, links and disk, for `machine.json`."""

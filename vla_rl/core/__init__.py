"""What every room may import: records, errors, the configuration's base class, the machine, shared memory, leases."""

"""Ways into zk from other systems: their files and calls, translated."""

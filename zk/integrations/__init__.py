"""Ways into zk from other systems: their files and calls, translated. Nothing here is needed by the rest of zk."""

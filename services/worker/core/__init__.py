"""What a worker decides, pure: no clock, engine, event loop or network. The other packages of the worker carry it out;
the simulator (``bench.sim``) does so in virtual time."""

"""Real nodes on one machine: daemons, agents, workers and etcd as real processes, to be killed and stopped for real."""

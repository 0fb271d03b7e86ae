"""What one machine with one NVIDIA card can show of elasticrl in seven minutes. docs/GPU.md says how to run it and read it."""

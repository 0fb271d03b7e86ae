"""PPO and its kin: what a step is made of. Read trainer.py first; losses.py, advantages.py and kl.py are the mathematics."""

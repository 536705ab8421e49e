"""The parts of under_fire.py: what is trained, by which systems, who restarts it, what is done to it, and what that cost."""

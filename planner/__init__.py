"""The vocabulary and the decision. Never imports torch or simpy."""

"""What is wrong between the ranks of a run: who waits where, who has left."""

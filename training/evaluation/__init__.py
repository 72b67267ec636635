"""What ``training.evaluate`` measures beside the listening: spoken answers, the codec's best, speed; and the table."""

"""The parts of `kvferry chat`: what is typed, what is sent, what is received, and what reaches the terminal."""

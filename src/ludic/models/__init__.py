"""Models: the torch code that the engine and the trainer share. Import the modules you need; this one is light."""

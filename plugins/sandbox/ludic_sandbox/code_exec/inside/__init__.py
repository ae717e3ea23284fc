"""Programs that run inside the sandbox. They are sent there as text, and are never imported by the library."""

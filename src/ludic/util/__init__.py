"""Files, URLs, processes and packages: what every part may use and no part is about. Loads nothing."""

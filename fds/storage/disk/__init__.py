"""Files and folders: what is read and written, locked, published whole, and kept open."""

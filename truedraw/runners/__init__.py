"""What computes rows. Each file is one kind of model; registry.py knows them by name."""

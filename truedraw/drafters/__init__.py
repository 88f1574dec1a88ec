"""What proposes tokens. Each file is one drafter; registry.py knows them by name."""

"""What tests of this package and of its users' adapters are built from."""

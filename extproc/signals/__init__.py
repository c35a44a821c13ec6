"""What the service learns while it runs: from Envoy, and from the workers themselves."""

"""What Envoy is told. Pure builders turn ``model.EnvoyModel`` into resources; ``ads`` serves them."""

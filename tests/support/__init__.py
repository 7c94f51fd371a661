"""What the tests share: models, fakes, workers and oracles."""

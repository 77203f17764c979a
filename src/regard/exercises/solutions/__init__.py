"""Solutions of the coding exercises; what stands behind `# hole:` says what a student is to write there."""

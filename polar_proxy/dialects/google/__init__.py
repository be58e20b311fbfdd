"""Google GenerateContent."""

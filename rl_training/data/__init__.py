"""Where experience is kept between the environment and the update."""

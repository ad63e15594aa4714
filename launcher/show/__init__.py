"""Values rendered as text, HTML and SVG. Knows none of this kit's concepts, and imports none of its other packages."""

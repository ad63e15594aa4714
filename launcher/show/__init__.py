"""Values rendered as text, HTML and SVG. Knows no noun of this kit, and imports none of its rooms."""

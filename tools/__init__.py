"The machinery behind `make`: site, chapters, checks. Not part of the installed package."

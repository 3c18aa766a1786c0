module kvferry.invalid/build/pause

go 1.24.0

module kvferry.invalid/build/prometheus

go 1.26.0

tool github.com/prometheus/prometheus/cmd/prometheus

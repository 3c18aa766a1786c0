// Command pause keeps a pod's namespaces alive: it reaps orphans until it is told to stop.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	heard := make(chan os.Signal, 8)
	signal.Notify(heard, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for number := range heard {
		if number != syscall.SIGCHLD {
			return
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}

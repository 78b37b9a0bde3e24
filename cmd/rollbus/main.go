// Command rollbus dispatches the rollouts of reinforcement-learning training
// over inference engines, on NATS JetStream. `rollbus help` lists what it does.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}

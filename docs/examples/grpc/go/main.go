// Streams a chat answer of kvferry: go run . 127.0.0.1:9000 "Why is the sky blue?"
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	kvferryv1 "kvferry.dev/kvferry/v1"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: main HOST:PORT PROMPT")
	}
	connection, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	// With API keys: ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)

	stream, err := kvferryv1.NewInferenceClient(connection).Generate(ctx, &kvferryv1.GenerateRequest{
		Prompt: &kvferryv1.GenerateRequest_Chat{Chat: &kvferryv1.Chat{
			Messages: []*kvferryv1.ChatMessage{{Role: "user", Content: os.Args[2]}},
		}},
		Sampling: &kvferryv1.SamplingParams{Temperature: proto.Float64(0), MaxTokens: proto.Uint32(64)},
	})
	if err != nil {
		log.Fatal(err)
	}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			fmt.Println()
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(part.Text)
	}
}

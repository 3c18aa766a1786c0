// OpenAI's library for Go: chat, streams, functions, structured outputs, Responses, embeddings, errors.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

func check(holds bool, what string) {
	if !holds {
		fmt.Println("does not hold:", what)
		os.Exit(1)
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	return value
}

func main() {
	url, model, ctx := os.Args[1], os.Args[2], context.Background()
	client := openai.NewClient(option.WithBaseURL(url+"/v1/"), option.WithAPIKey("none"), option.WithMaxRetries(0))
	chat := func() openai.ChatCompletionNewParams {
		return openai.ChatCompletionNewParams{
			Model:       model,
			Messages:    []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Is it sunny in Paris?")},
			Temperature: openai.Float(0),
			MaxTokens:   openai.Int(60),
		}
	}
	whole := must(client.Chat.Completions.New(ctx, chat()))
	check(whole.Choices[0].Message.Content != "", "chat has text")

	asked := chat()
	asked.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	stream := client.Chat.Completions.NewStreaming(ctx, asked)
	sum := openai.ChatCompletionAccumulator{}
	for stream.Next() {
		check(sum.AddChunk(stream.Current()), "chunks of one answer")
	}
	check(stream.Err() == nil, fmt.Sprint("stream without an error: ", stream.Err()))
	check(sum.Choices[0].Message.Content == whole.Choices[0].Message.Content, "a stream has the text of the answer")
	check(sum.Usage.CompletionTokens > 0, "a stream has the usage")

	schema := map[string]any{
		"type":                 "object",
		"properties":           map[string]any{"city": map[string]any{"type": "string", "enum": []string{"Paris", "Oslo"}}},
		"required":             []string{"city"},
		"additionalProperties": false,
	}
	asked = chat()
	asked.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(
		shared.FunctionDefinitionParam{Name: "get_weather", Parameters: schema},
	)}
	asked.ToolChoice = openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: openai.String("required")}
	called := must(client.Chat.Completions.New(ctx, asked))
	check(called.Choices[0].Message.ToolCalls[0].Function.Name == "get_weather", "a required call")

	asked = chat()
	asked.ResponseFormat = openai.ChatCompletionNewParamsResponseFormatUnion{
		OfJSONSchema: &shared.ResponseFormatJSONSchemaParam{
			JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "place", Schema: schema},
		},
	}
	var place struct{ City string }
	must(0, json.Unmarshal([]byte(must(client.Chat.Completions.New(ctx, asked)).Choices[0].Message.Content), &place))
	check(place.City == "Paris" || place.City == "Oslo", "an answer of the schema")

	answer := must(client.Responses.New(ctx, responses.ResponseNewParams{
		Model:           model,
		Input:           responses.ResponseNewParamsInputUnion{OfString: openai.String("Name a city.")},
		MaxOutputTokens: openai.Int(8),
	}))
	check(answer.OutputText() != "", "a response has text")
	vectors := must(client.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: model,
		Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("a city")},
	}))
	check(len(vectors.Data[0].Embedding) > 0, "a vector")

	asked = chat()
	asked.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage(strings.Repeat("hello ", 9000))}
	_, err := client.Chat.Completions.New(ctx, asked)
	var refused *openai.Error
	check(errors.As(err, &refused) && refused.Code == "context_length_exceeded", "a prompt that is too long is refused")
}

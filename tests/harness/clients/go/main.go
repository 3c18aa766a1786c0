// Command client calls a server with OpenAI's Go package and prints what it received, as one JSON object.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"os"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

var schema = map[string]any{
	"type":                 "object",
	"properties":           map[string]any{"city": map[string]any{"type": "string", "maxLength": 12}},
	"required":             []string{"city"},
	"additionalProperties": false,
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	ctx, url, model := context.Background(), os.Args[1], os.Args[2]
	client := openai.NewClient(option.WithBaseURL(url), option.WithAPIKey("any"), option.WithMaxRetries(0))
	found := map[string]any{}

	models, err := client.Models.List(ctx)
	check(err)
	found["models"] = len(models.Data)

	chat := openai.ChatCompletionNewParams{
		Model:       model,
		Messages:    []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Name a city.")},
		Temperature: openai.Float(0),
		MaxTokens:   openai.Int(24),
	}
	whole, err := client.Chat.Completions.New(ctx, chat)
	check(err)
	found["chat"] = whole.Choices[0].Message.Content
	found["usage"] = whole.Usage.CompletionTokens

	stream := client.Chat.Completions.NewStreaming(ctx, chat)
	collected := openai.ChatCompletionAccumulator{}
	for stream.Next() {
		collected.AddChunk(stream.Current())
	}
	check(stream.Err())
	found["stream"] = collected.Choices[0].Message.Content

	formatted := chat
	formatted.ResponseFormat = openai.ChatCompletionNewParamsResponseFormatUnion{
		OfJSONSchema: &shared.ResponseFormatJSONSchemaParam{
			JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "city", Schema: schema, Strict: openai.Bool(true)},
		},
	}
	formatted.MaxTokens = openai.Int(64)
	object, err := client.Chat.Completions.New(ctx, formatted)
	check(err)
	found["object"] = object.Choices[0].Message.Content

	calling := chat
	calling.MaxTokens = openai.Int(128)
	calling.ParallelToolCalls = openai.Bool(false)
	calling.Tools = []openai.ChatCompletionToolUnionParam{
		openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
			Name: "get_weather", Description: openai.String("Returns the weather."), Parameters: schema,
		}),
	}
	calling.ToolChoice = openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: openai.String("required")}
	called, err := client.Chat.Completions.New(ctx, calling)
	check(err)
	call := called.Choices[0].Message.ToolCalls[0]
	found["call"] = call.Function.Name
	found["arguments"] = call.Function.Arguments
	calling.Messages = append(calling.Messages, called.Choices[0].Message.ToParam(), openai.ToolMessage("cold", call.ID))
	calling.ToolChoice = openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: openai.String("none")}
	calling.MaxTokens = openai.Int(16)
	answered, err := client.Chat.Completions.New(ctx, calling)
	check(err)
	found["answered"] = answered.Choices[0].Message.Content

	completed, err := client.Completions.New(ctx, openai.CompletionNewParams{
		Model:       openai.CompletionNewParamsModel(model),
		Prompt:      openai.CompletionNewParamsPromptUnion{OfString: openai.String("The capital of France is")},
		Temperature: openai.Float(0),
		MaxTokens:   openai.Int(8),
	})
	check(err)
	found["completion"] = completed.Choices[0].Text

	vector, err := client.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: model, Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("a ferry")},
	})
	check(err)
	found["dimensions"] = len(vector.Data[0].Embedding)

	request := responses.ResponseNewParams{
		Model:           model,
		Input:           responses.ResponseNewParamsInputUnion{OfString: openai.String("Name a city.")},
		Temperature:     openai.Float(0),
		MaxOutputTokens: openai.Int(24),
	}
	response, err := client.Responses.New(ctx, request)
	check(err)
	found["response"] = response.OutputText()
	text, events := "", client.Responses.NewStreaming(ctx, request)
	for events.Next() {
		if event := events.Current(); event.Type == "response.output_text.delta" {
			text += event.Delta
		}
	}
	check(events.Err())
	found["response_stream"] = text

	chat.Model = "no-such-model"
	_, err = client.Chat.Completions.New(ctx, chat)
	var refused *openai.Error
	if !errors.As(err, &refused) {
		log.Fatalf("no error of the API: %v", err)
	}
	found["refused"] = refused.StatusCode
	found["refused_param"] = refused.Param
	check(json.NewEncoder(os.Stdout).Encode(found))
}

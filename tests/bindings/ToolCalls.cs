using System;
using System.Linq;
using System.Threading;
using Frameshard;

/// <summary>ToolCalls PYTHON MODEL: prints the calls of an answer, and goes on with their results.</summary>
internal static class ToolCalls
{
    private static void Main(string[] arguments)
    {
        var options = new LaunchOptions { Python = arguments[0], Model = arguments[1], Device = "cpu", NThreads = 1 };
        using (var sidecar = Sidecar.Launch(options))
        {
            const string schema =
                "{\"type\": \"object\", \"properties\": {\"item\": {\"enum\": [\"ale\"]}}, \"required\": [\"item\"]}";
            var price = new Tool { Name = "price", Description = "The price of an item.", Schema = schema };
            var job = sidecar.Ask("What is ale?", new JobOptions
            {
                Conversation = "mira", Tools = new[] { price }, ToolChoice = "price",
                Sampling = new Sampling { MaxTokens = 150, Temperature = 1.5, Seed = 5 },
            });
            var heard = 0;
            job.OnToolCall += call => heard++;
            Wait(sidecar, job);
            Console.WriteLine(heard > 0 && heard == job.ToolCalls.Count);
            Console.WriteLine(job.ToolCalls[0].Name + " " + job.ToolCalls[0].Arguments.Replace(" ", ""));
            var results = job.ToolCalls.ToDictionary(call => call.CallId, call => "2 gold");
            var few = new Sampling { MaxTokens = 5 };
            Wait(sidecar, sidecar.ToolResults(results, new JobOptions { Conversation = "mira", Sampling = few }));
            Console.WriteLine(string.Join(" ", sidecar.History("mira").Take(3).Select(message => message.Role)));
        }
    }

    private static void Wait(Sidecar sidecar, Job job)
    {
        while (!job.Completion.IsCompleted)
        {
            ReusedMemory.Poll(sidecar);
            Thread.Sleep(5);
        }
        job.Completion.GetAwaiter().GetResult();
    }
}

using System.IO;
using UnrealBuildTool;

public class Frameshard : ModuleRules
{
    public Frameshard(ReadOnlyTargetRules Target) : base(Target)
    {
        PCHUsage = PCHUsageMode.UseExplicitOrSharedPCHs;
        CppStandard = CppStandardVersion.Cpp20;
        PublicDependencyModuleNames.AddRange(new[] { "Core", "CoreUObject", "Engine", "DeveloperSettings" });

        // What README.md has put there: frameshard.h, frameshard_game.hpp and the client library.
        string Client = Path.Combine(PluginDirectory, "ThirdParty", "frameshard");
        PrivateIncludePaths.Add(Path.Combine(Client, "include"));
        if (Target.Platform == UnrealTargetPlatform.Win64)
        {
            PublicAdditionalLibraries.Add(Path.Combine(Client, "lib", "libframeshard.dll.a"));
            PublicDelayLoadDLLs.Add("libframeshard.dll");
            RuntimeDependencies.Add(
                "$(TargetOutputDir)/libframeshard.dll", Path.Combine(Client, "bin", "libframeshard.dll"));
        }
        else
        {
            PublicAdditionalLibraries.Add(Path.Combine(Client, "lib", "libframeshard.so"));
            RuntimeDependencies.Add(Path.Combine(Client, "lib", "libframeshard.so"));
        }
    }
}

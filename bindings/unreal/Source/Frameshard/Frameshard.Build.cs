using System.IO;
using UnrealBuildTool;

public class Frameshard : ModuleRules
{
    public Frameshard(ReadOnlyTargetRules Target) : base(Target)
    {
        PCHUsage = PCHUsageMode.UseExplicitOrSharedPCHs;
        CppStandard = CppStandardVersion.Cpp20;
        PublicDependencyModuleNames.AddRange(new[] { "Core", "CoreUObject", "Engine", "DeveloperSettings" });

        // Put there by `make packages`: frameshard.h, frameshard_game.hpp and the client library.
        string Client = Path.Combine(PluginDirectory, "ThirdParty", "frameshard");
        PrivateIncludePaths.Add(Path.Combine(Client, "include"));
        if (Target.Platform == UnrealTargetPlatform.Win64)
        {
            PublicAdditionalLibraries.Add(Path.Combine(Client, "lib", "libframeshard.dll.a"));
            PublicDelayLoadDLLs.Add("frameshard.dll");
            RuntimeDependencies.Add(
                "$(TargetOutputDir)/frameshard.dll", Path.Combine(Client, "bin", "frameshard.dll"));
        }
        else
        {
            PublicAdditionalLibraries.Add(Path.Combine(Client, "lib", "libframeshard.so"));
            RuntimeDependencies.Add(Path.Combine(Client, "lib", "libframeshard.so"));
        }
    }
}

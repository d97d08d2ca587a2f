using UnrealBuildTool;

public class UnrealTavern : ModuleRules
{
    public UnrealTavern(ReadOnlyTargetRules Target) : base(Target)
    {
        PCHUsage = PCHUsageMode.UseExplicitOrSharedPCHs;
        PublicDependencyModuleNames.AddRange(new[] { "Core", "CoreUObject", "Engine", "UMG", "Frameshard" });
    }
}
